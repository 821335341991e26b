"""Workers as the coordinator sees them: connecting, installing, executing, setting aside and taking back."""
