"""Are gradients right, which rule serves which node, and what can be differentiated at all."""
