// Package controllers holds tests only: they compare what the controllers of
// Deployments, StatefulSets and Jobs do with what upstream's own do with the
// same objects, in any state. Where Dunlin means to differ the test says so.
package controllers
