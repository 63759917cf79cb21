"""A package, so that its fixtures end with it: a browser keeps a loop running, which later tests cannot have."""
