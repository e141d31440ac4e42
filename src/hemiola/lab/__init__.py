"""The lab, ``hemiola[lab]``: experiment files, the command line, reference tasks, reports."""
