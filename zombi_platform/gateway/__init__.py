"""The gateway: HTTP in front of the hot buffer."""
