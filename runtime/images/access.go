package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// accessRecord says that an image came with a pod's own login, and which
// namespaces have shown since that they may have it. An image without one came
// without a login, with the node's, or by hand, and is everybody's
// (KEP-2535, policy NeverVerifyPreloadedImages). A namespace is what has
// secrets, so who may make pods in it has its logins; and a password that was
// changed while the registry cannot be reached keeps no pod from starting.
type accessRecord struct {
	Digest     string   `json:"digest"`
	Namespaces []string `json:"namespaces"`
}

func (s *Store) accessPath(digest string) string { return s.path("access", hexOf(digest)) }

// mayHave says whether a namespace may have what is here. A record that cannot
// be read is nobody's yes.
func (s *Store) mayHave(digest, namespace string) bool {
	rec, err := readRecord[accessRecord](s.accessPath(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	return err == nil && rec.Digest == digest && slices.Contains(rec.Namespaces, namespace)
}

// grant notes that a namespace showed that it may have an image.
func (s *Store) grant(r *resolved, namespace string) error {
	for _, digest := range r.names() {
		rec, err := readRecord[accessRecord](s.accessPath(digest))
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, atomicfile.ErrCorrupt) {
			return err
		}
		if slices.Contains(rec.Namespaces, namespace) {
			continue
		}
		b, err := json.Marshal(accessRecord{Digest: digest, Namespaces: append(rec.Namespaces, namespace)})
		if err != nil {
			return fmt.Errorf("image access: %w", err)
		}
		if err := atomicfile.Write(s.accessPath(digest), b, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// everybodys notes that an image can be had without a login.
func (s *Store) everybodys(r *resolved) error {
	for _, digest := range r.names() {
		if err := os.Remove(s.accessPath(digest)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("image access: %w", err)
		}
	}
	return nil
}

// hasLayers says whether all of an image that is described here is.
func (s *Store) hasLayers(r *resolved) bool {
	return !slices.ContainsFunc(r.m.Layers, func(l v1.Descriptor) bool { return !s.hasBlob(l.Digest.String(), l.Size) })
}

// named says whether an image was here as a whole before: only then it can have
// come in another way. Its layers may be others' as well, such as those of a
// public base; manifest and config may be what a pull that broke off left.
func (s *Store) named(r *resolved) (bool, error) {
	list, err := s.names()
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(list, func(n nameRecord) bool { return slices.Contains(r.names(), n.Digest) }), nil
}

// names are the digests that the image can be asked for by.
func (r *resolved) names() []string {
	if m := r.manifest.String(); m != r.digest {
		return []string{r.digest, m}
	}
	return []string{r.digest}
}

// settle notes whose an image is that was just asked for.
func (p *Puller) settle(r *resolved, session *registry.Session, namespace string, here bool) error {
	switch {
	case !session.Personal():
		return p.s.everybodys(r)
	case here && p.s.mayHave(r.digest, namespace):
		return nil // it came in another way, and stays everybody's
	}
	return p.s.grant(r, namespace)
}

// allowed returns what is here if the pod may have it: an image that came with
// another namespace's login is asked for again, with the pod's own.
func (p *Puller) allowed(ctx context.Context, req workload.ImageRequest, ref Ref, here *resolved) (*resolved, error) {
	if p.s.mayHave(here.digest, req.PodNamespace) {
		return here, nil
	}
	hint := fmt.Sprintf("it was pulled for another namespace, with a login of that: give pods of %s an imagePullSecret for it", req.PodNamespace)
	if req.Policy == policyNever {
		return nil, &workload.StartError{Reason: ReasonNeverPull, Message: fmt.Sprintf("image %s on this node is not for namespace %s", req.Image, req.PodNamespace), Hint: hint + ", and another imagePullPolicy than Never"}
	}
	ask, cancel := context.WithTimeoutCause(ctx, askTimeout, fmt.Errorf("no answer within %s", askTimeout))
	defer cancel()
	session := p.client.Open(ref.Registry, ref.Repository, req.Credentials)
	if _, err := session.Head(ask, here.digest); err != nil {
		return nil, &workload.StartError{Reason: ReasonPull, Err: err, Hint: hint,
			Message: fmt.Sprintf("image %s is on this node, and the registry was asked whether namespace %s may have it: %v", req.Image, req.PodNamespace, err)}
	}
	return here, p.settle(here, session, req.PodNamespace, false)
}
