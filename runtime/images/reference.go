package images

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Reasons of a StartError, upstream's words.
const (
	ReasonNeverPull   = "ErrImageNeverPull"
	ReasonPull        = "ErrImagePull"
	ReasonInvalidName = "InvalidImageName"
	ReasonDamaged     = "ImageDamaged"
)

// Ref is a parsed image reference.
type Ref struct {
	Registry   string // "docker.io", "registry.example:5000"
	Repository string // "library/busybox"
	Tag        string // empty when only a digest is given
	Digest     string // "sha256:...", empty when only a tag is given
}

const dockerHub = "docker.io"

// ParseRef reads a reference as Docker and Kubernetes do: without a registry
// it is docker.io's, without tag and digest it is latest. The error is a
// *workload.StartError with reason InvalidImageName.
func ParseRef(s string) (Ref, error) {
	invalid := func(err error) (Ref, error) {
		return Ref{}, &workload.StartError{Reason: ReasonInvalidName, Fatal: true, Err: err,
			Message: fmt.Sprintf("%q is not the name of an image: %v", s, err), Hint: "write REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:..."}
	}
	rest, digest, pinned := strings.Cut(s, "@")
	if pinned && !validDigest(digest) {
		return invalid(fmt.Errorf("after @ stands no sha256: and 64 hexadecimal digits"))
	}
	if strings.Contains(rest, "://") {
		return invalid(fmt.Errorf("it begins with a scheme"))
	}
	// A tag beside a digest is for people; the digest decides.
	t, err := name.NewTag(rest)
	if err != nil {
		return invalid(err)
	}
	r := Ref{Registry: t.RegistryStr(), Repository: t.RepositoryStr(), Tag: t.TagStr(), Digest: digest}
	if r.Registry == name.DefaultRegistry {
		r.Registry = dockerHub
	}
	if pinned && !strings.Contains(rest[strings.LastIndexByte(rest, '/')+1:], ":") {
		r.Tag = ""
	}
	return r, nil
}

// NamesRegistry says whether an image names its registry. Modules are pulled
// only then: a name that was meant for `dunlin import` must not reach whoever
// has that name at Docker Hub.
func NamesRegistry(image string) bool {
	first, _, ok := strings.Cut(image, "/")
	return ok && (strings.ContainsAny(first, ".:") || first == "localhost")
}

// Repo is registry and repository.
func (r Ref) Repo() string { return r.Registry + "/" + r.Repository }

// Name is the full name by which the store knows the image.
func (r Ref) Name() string {
	if r.Digest != "" {
		return r.Repo() + "@" + r.Digest
	}
	return r.Repo() + ":" + r.Tag
}

const digestPrefix = "sha256:"

func validDigest(d string) bool {
	h, ok := strings.CutPrefix(d, digestPrefix)
	if !ok || len(h) != 2*sha256.Size || strings.ToLower(h) != h {
		return false
	}
	_, err := hex.DecodeString(h)
	return err == nil
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return digestPrefix + hex.EncodeToString(sum[:])
}

func hexOf(digest string) string { return strings.TrimPrefix(digest, digestPrefix) }
