//go:build !dunlin_next

package feature

// Level is the highest feature level that this build understands.
const Level uint32 = 1
