"""The ``arbi`` command. Torch-free until a command needs a model."""
