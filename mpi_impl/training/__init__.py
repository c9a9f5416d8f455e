"""From options to a trained model: what runs around the layers."""
