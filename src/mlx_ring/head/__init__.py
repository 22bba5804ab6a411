"""One head, composed from its settings: models, replicas, instances, placement, HTTP connections."""
