"""Names of the files in a run directory that the trainer writes and a report reads."""

SETTINGS_NAME = "settings.json"
SCHEDULE_NAME = "schedule.toml"
METRICS_NAME = "metrics.jsonl"
FATAL_NAME = "fatal.txt"
LOCK_NAME = "lock"
