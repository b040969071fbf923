"""Are gradients right, and which rule serves which node?"""
