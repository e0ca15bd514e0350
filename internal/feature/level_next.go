//go:build dunlin_next

package feature

// Level is one more than the released one: a build of the same tree that
// stands for the next release, for the tests of upgrades.
const Level uint32 = 2
