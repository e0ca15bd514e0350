// Package oracle holds tests only: they compare Dunlin's defaults and
// validation with upstream's own code, for hand-written objects and for
// thousands of mutations of them. It is a module of its own, since upstream's
// is heavy; the product never imports it.
//
// A difference is a failure unless testdata/allowed.txt names it with a
// reason; an entry that nothing needs any more is a failure too.
package oracle
