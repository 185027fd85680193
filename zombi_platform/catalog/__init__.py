"""What engines talk to: the tables as Iceberg REST serves them, committed and live."""
