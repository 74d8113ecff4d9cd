"""GLM-Image: a language model writes the codes of a picture, from which a diffusion transformer generates it."""
