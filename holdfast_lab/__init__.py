"""The laboratory of holdfast: studies, campaigns, emulated faulty devices and the demo."""
