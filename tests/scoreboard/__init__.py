"""The scoreboard: what is asked is right, and no verdict can be bought."""
