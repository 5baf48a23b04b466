"""The network, as the report draws it. It knows nothing of optimizers, devices or servers."""
