"""`make mutants`: does a test fail, if a fact, a threshold or a formula of the four rooms is wrong? docs/mutants.md.

`mutations` finds what can be changed in a file, `draw` chooses among it, `contexts` records which test runs which
function, `runner` runs the tests of a mutant in a copy of the tree, `page` writes docs/mutants.md.

The mutating itself is 200 lines of `ast`. mutmut and cosmic-ray mutate operators and numbers of any statement, but leave
no entry out of a table of names, know neither the operators that rules emit (op.Add) nor refusals, and start a test
process that imports everything for each mutant.
"""
