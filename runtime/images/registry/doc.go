// Package registry reads from registries of the OCI distribution
// specification: manifests, and blobs from any offset on. It knows mirrors,
// tokens, and what the operator wrote into registries.yaml, and says what went
// wrong in a way that a pod's status can carry.
//
// go-containerregistry's own client is not used: it cannot ask for a part of a
// blob, and brings the configuration of docker's command line with it.
//
// The package has no goroutine. A Session belongs to one pull.
package registry
