// Package registry is the one path by which objects are read and written
// inside the control plane, for the HTTP API and for the controllers alike:
// typed Kubernetes objects in and out, conditional Raft ops underneath.
// A create or update passes admission, defaulting, validation and the kind's
// strategy (generation, status separation, deletion rules) here, so a
// controller cannot write what a client could not.
//
// Errors are *apierrors.StatusError with upstream's reasons and messages, so
// callers use apierrors.IsConflict, IsNotFound and so on.
package registry
