"""The images of a location: their manifests, chains, commit, verification, and how they become CRIU's files again."""
