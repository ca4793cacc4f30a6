"""Request schemas: attrs classes that are checked strictly and described in the OpenAPI document."""
