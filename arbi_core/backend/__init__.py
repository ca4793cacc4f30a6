"""How layers reach the backend that stores and reads their state."""
