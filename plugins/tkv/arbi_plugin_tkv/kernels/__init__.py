"""Triton kernels over the pages of `arbi_plugin_tkv.codec.layout`, each with its twin in plain torch."""
