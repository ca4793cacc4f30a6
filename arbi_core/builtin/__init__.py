"""The plugins that ship with the core, in the same form as everybody else's."""
