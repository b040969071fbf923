"""The operators of the domain, one module each; `registry` lists them."""
