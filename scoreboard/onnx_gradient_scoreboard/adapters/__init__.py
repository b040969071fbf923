"""One module a producer: `answer(question)` gives {name: array}, by input or, for jvp, by output; or it raises."""
