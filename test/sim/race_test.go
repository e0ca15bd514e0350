//go:build race

package sim

// raced: with the race detector everything takes ten times as long, so there
// is less of it; "make sim" runs without.
const raced = true
