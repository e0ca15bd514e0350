package images

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// ReasonSignature is upstream's word for an image without the signature that
// it needs.
const ReasonSignature = "SignatureValidationFailed"

// What cosign stores beside an image (specs/SIGNATURE_SPEC.md of
// github.com/sigstore/cosign): a manifest under a tag made of the image's
// digest, and in it one layer, the signed text, for each signature.
const (
	simpleSigning = "application/vnd.dev.cosign.simplesigning.v1+json"
	signatureMark = "dev.cosignproject.cosign/signature"
	maxPayload    = 64 << 10
	maxSignatures = 64 // of one image
)

// signature is a signed text, which names the image.
type signature struct {
	Payload   []byte `json:"payload"`
	Signature []byte `json:"signature"`
}

func (s *Store) signaturePath(digest string) string { return s.path("signatures", hexOf(digest)) }

// signatures of an image that are here.
func (s *Store) signatures(digest string) []signature {
	list, err := readRecord[[]signature](s.signaturePath(digest))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.setAside(s.signaturePath(digest), err)
	}
	return list
}

// keepSignatures adds to what is here; who trusts them verifies them.
func (s *Store) keepSignatures(digest string, more []signature) error {
	list := s.signatures(digest)
	for _, g := range more {
		if !slices.ContainsFunc(list, func(h signature) bool { return bytes.Equal(g.Signature, h.Signature) }) {
			list = append(list, g)
		}
	}
	list = list[max(len(list)-maxSignatures, 0):]
	b, err := json.Marshal(list)
	if err != nil {
		return fmt.Errorf("signature: %w", err)
	}
	return atomicfile.Write(s.signaturePath(digest), b, 0o600)
}

// sweepSignatures removes those of images that are gone.
func (s *Store) sweepSignatures() {
	entries, err := os.ReadDir(s.path("signatures"))
	if err != nil {
		return
	}
	for _, e := range entries {
		if len(e.Name()) == hexLen && !s.hasBlob(digestPrefix+e.Name(), -1) {
			_ = os.Remove(s.path("signatures", e.Name()))
		}
	}
}

// isSignature says that a manifest is not of an image, but of its signatures.
func isSignature(m *v1.Manifest) bool {
	return len(m.Layers) > 0 && m.Layers[0].MediaType == simpleSigning
}

// signaturesIn reads a manifest of signatures; get reads one of its blobs,
// verified. It returns them by the image that each is for.
func signaturesIn(m *v1.Manifest, get func(digest string) ([]byte, error)) (map[string][]signature, error) {
	out := map[string][]signature{}
	for i := range m.Layers[:min(len(m.Layers), maxSignatures)] {
		l := &m.Layers[i]
		sig, err := base64.StdEncoding.DecodeString(l.Annotations[signatureMark])
		if l.MediaType != simpleSigning || err != nil || len(sig) == 0 || l.Size > maxPayload {
			continue
		}
		payload, err := get(l.Digest.String())
		if err != nil {
			return nil, err
		}
		if d := signedDigest(payload); d != "" {
			out[d] = append(out[d], signature{Payload: payload, Signature: sig})
		}
	}
	return out, nil
}

// signedDigest is the image that a signed text is about.
func signedDigest(payload []byte) string {
	var p struct {
		Critical struct {
			Image struct {
				Digest string `json:"docker-manifest-digest"`
			} `json:"image"`
			Type string `json:"type"`
		} `json:"critical"`
	}
	if json.Unmarshal(payload, &p) != nil || p.Critical.Type != "cosign container image signature" || !validDigest(p.Critical.Image.Digest) {
		return ""
	}
	return p.Critical.Image.Digest
}

// verify says whether the key made the signature of that image.
func (g signature) verify(digest string, key crypto.PublicKey) bool {
	if signedDigest(g.Payload) != digest {
		return false
	}
	sum := sha256.Sum256(g.Payload)
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		return ecdsa.VerifyASN1(k, sum[:], g.Signature)
	case ed25519.PublicKey:
		return ed25519.Verify(k, g.Payload, g.Signature)
	case *rsa.PublicKey:
		return rsa.VerifyPKCS1v15(k, crypto.SHA256, sum[:], g.Signature) == nil
	}
	return false
}

// signed makes sure that one of the request's keys signed the image: its
// index, or what is in it for this platform. What is here decides; only where
// that does not, and the pod may pull, the registry is asked.
func (p *Puller) signed(ctx context.Context, req workload.ImageRequest, r *resolved, session *registry.Session) error {
	if len(req.SignedBy) == 0 {
		return nil
	}
	digests := slices.Compact([]string{r.digest, r.manifest.String()})
	count := 0
	check := func() bool {
		count = 0
		for _, d := range digests {
			for _, g := range p.s.signatures(d) {
				count++
				if slices.ContainsFunc(req.SignedBy, func(k crypto.PublicKey) bool { return g.verify(d, k) }) {
					return true
				}
			}
		}
		return false
	}
	if check() {
		return nil
	}
	if req.Policy != policyNever {
		ref, err := ParseRef(req.Image)
		if err != nil {
			return err
		}
		if session == nil {
			session = p.client.Open(ref.Registry, ref.Repository, req.Credentials)
		}
		for _, d := range digests {
			if err := p.fetchSignatures(ctx, session, d); err != nil {
				return unsigned(req, r.digest, count, err)
			}
		}
		if check() {
			return nil
		}
	}
	return unsigned(req, r.digest, count, nil)
}

// fetchSignatures brings what the registry has.
func (p *Puller) fetchSignatures(ctx context.Context, session *registry.Session, digest string) error {
	raw, err := session.Manifest(ctx, "sha256-"+hexOf(digest)+".sig", maxManifest)
	var re *registry.Error
	if errors.As(err, &re) && re.Code == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil || !isSignature(m) {
		return nil //nolint:nilerr // something else has that tag: no signature
	}
	found, err := signaturesIn(m, func(d string) ([]byte, error) { return session.Small(ctx, d, maxPayload) })
	if err != nil || len(found[digest]) == 0 {
		return err
	}
	return p.s.keepSignatures(digest, found[digest])
}

func unsigned(req workload.ImageRequest, digest string, count int, err error) error {
	out := &workload.StartError{Reason: ReasonSignature, Err: err,
		Hint: fmt.Sprintf("sign it with `cosign sign --key`, or change the image policy of namespace %s", req.PodNamespace)}
	why := "it has no signature"
	if req.Policy == policyNever {
		why = "no signature of it is on this node"
	}
	if count > 0 {
		why = fmt.Sprintf("none of its %d signatures is by a key of the policy", count)
	}
	if err != nil {
		why = fmt.Sprintf("its signature cannot be fetched: %v", err)
		var re *registry.Error
		if errors.As(err, &re) {
			out.Hint, out.RetryAfter = re.Hint(), re.RetryAfter
		}
	}
	out.Message = fmt.Sprintf("image %s (%.19s) is refused by the image policy of namespace %s: %s", req.Image, digest, req.PodNamespace, why)
	return out
}

// takeSignatures keeps an archive's, as cosign save writes them.
func (s *Store) takeSignatures(a *archive, m *v1.Manifest) (digest string, err error) {
	found, err := signaturesIn(m, func(d string) ([]byte, error) { return s.describing(a, d, maxPayload) })
	if err != nil {
		return "", err
	}
	for d, list := range found {
		if err := s.keepSignatures(d, list); err != nil {
			return "", err
		}
		digest = d
	}
	if digest == "" {
		return "", errors.New("there is no signature in it")
	}
	return digest, nil
}

// Names by which an image policy may know an image: as it is written, and in
// full, without tag and digest.
func Names(image string) []string {
	if strings.Contains(image, "://") {
		return []string{image}
	}
	ref, err := ParseRef(image)
	if err != nil {
		return []string{image}
	}
	short, _, _ := strings.Cut(image, "@")
	if i := strings.LastIndexByte(short, ':'); i > strings.LastIndexByte(short, '/') {
		short = short[:i]
	}
	return []string{short, ref.Repo()}
}
