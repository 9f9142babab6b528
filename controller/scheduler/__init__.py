"""Pure scheduling: views of queue and cluster in, decisions out."""
