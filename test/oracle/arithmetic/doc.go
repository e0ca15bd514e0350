// Package arithmetic holds tests only: they compare what Dunlin's scheduler and
// controllers decide with what upstream's own decide, for random clusters.
// Both are used whole, as black boxes, on the same objects. Where Dunlin means
// to differ the generator leaves the case out, and says so.
package arithmetic
