// Package bench measures the budgets and prints them beside their targets.
// Run it with 'make bench'. Figures, not verdicts: nothing here fails because
// it was slow.
package bench
