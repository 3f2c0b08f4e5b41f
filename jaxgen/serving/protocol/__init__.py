"""What goes over the wire: request bodies as they are accepted, answers as they are documented."""
