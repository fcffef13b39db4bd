"""The command-line verbs of the laboratory: demo, train, study and campaign."""
