"""Events as soon as they are acked, for any Iceberg engine: committed files and staged hot rows."""
