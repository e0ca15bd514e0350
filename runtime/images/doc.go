// Package images keeps the images that came from registries or by import, and
// hands them to the runtimes, offline.
//
// A Store is one folder:
//
//	blobs/sha256/HEX  manifests, indexes, configs, layers as they were delivered
//	names/HEX         what a name means (HEX is the hash of the name)
//	signatures/HEX    signatures of the image with that digest
//	layers/HEX        the record of an unpacked layer (HEX is its diff id)
//	l/NAME            the unpacked layer: short, since overlayfs takes few bytes of options
//	tmp/              what is being made; its makers hold locks on it
//
// Every change is one rename, after what it names is on the disk: at any
// moment of a power cut the store holds what it held, or more. Several
// processes may use one store. A Store has no goroutine.
package images
