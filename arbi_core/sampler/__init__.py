"""Drawing tokens: parameters, penalties, filters, reproducible noise, log-probabilities."""
