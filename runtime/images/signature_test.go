package images

import (
	"archive/tar"
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// signatureOf is what cosign pushes beside an image: one layer for each
// signature.
func signatureOf(t testing.TB, digest string, signers ...crypto.Signer) *made {
	t.Helper()
	m := &made{blobs: map[string][]byte{}}
	man := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: m.add([]byte(`{"rootfs":{"type":"layers"}}`))}
	man.Config.MediaType = types.OCIConfigJSON
	payload := []byte(`{"critical":{"identity":{"docker-reference":"registry.example/app"},"image":{"docker-manifest-digest":"` + digest +
		`"},"type":"cosign container image signature"},"optional":null}`)
	for _, s := range signers {
		sum := sha256.Sum256(payload)
		text, opts := sum[:], crypto.SignerOpts(crypto.SHA256)
		if _, ok := s.(ed25519.PrivateKey); ok {
			text, opts = payload, crypto.Hash(0)
		}
		sig, err := s.Sign(rand.Reader, text, opts)
		if err != nil {
			t.Fatal(err)
		}
		l := m.add(payload)
		l.MediaType, l.Annotations = simpleSigning, map[string]string{signatureMark: base64.StdEncoding.EncodeToString(sig)}
		man.Layers = append(man.Layers, l)
	}
	raw := mustJSON(t, &man)
	m.manifest = digestOf(raw)
	m.blobs[m.manifest] = raw
	return m
}

func signatureTag(digest string) string { return "sha256-" + hexOf(digest) + ".sig" }

func newKeys(t testing.TB) (keys []crypto.Signer, public []crypto.PublicKey) {
	t.Helper()
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rs, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	keys = []crypto.Signer{ec, ed, rs}
	for _, k := range keys {
		public = append(public, k.Public())
	}
	return keys, public
}

// TestSignatures: what is not signed by a key of the policy is neither pulled
// nor used; what is, is also known offline and when the tag moves.
func TestSignatures(t *testing.T) {
	needRoot(t)
	keys, public := newKeys(t)
	others, _ := newKeys(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("a", "b")))
	foreign := makeImage(t, Platform{"linux", "s390x", ""}, gzipped)
	for i, name := range []string{"ecdsa", "ed25519", "rsa"} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			top := push(t, h.srv.URL, "app", "1", nil, m, foreign) // an index: cosign signs that
			image := h.host + "/app:1"
			s := testStore(t)
			p := testPuller(t, s, registry.Config{})
			req := workload.ImageRequest{Image: image, Policy: "IfNotPresent", PodNamespace: "shop", SignedBy: public[i : i+1]}
			refused := func(want string) {
				t.Helper()
				_, err := p.Image(t.Context(), req, nil)
				if reason(err) != ReasonSignature || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "namespace shop") {
					t.Errorf("%v, want %q", err, want)
				}
			}
			refused("it has no signature")
			for _, q := range h.questions() {
				if strings.Contains(q, layerOf(t, m)) {
					t.Error("layers of an unsigned image were fetched")
				}
			}
			push(t, h.srv.URL, "app", signatureTag(top), nil, signatureOf(t, top, others[i]))
			refused("none of its 1 signatures is by a key")
			push(t, h.srv.URL, "app", signatureTag(top), nil, signatureOf(t, m.manifest, keys[i])) // of another digest
			refused("none of its 1 signatures")
			push(t, h.srv.URL, "app", signatureTag(top), nil, signatureOf(t, top, others[i], keys[i]))
			img, err := p.Image(t.Context(), req, nil)
			if err != nil || content(t, img, "a") != "b" {
				t.Fatal(img, err)
			}
			h.srv.Close()
			req.Policy = "Never"
			if _, err := testPuller(t, s, registry.Config{}).Image(t.Context(), req, nil); err != nil {
				t.Errorf("offline: %v", err)
			}
			req.SignedBy = []crypto.PublicKey{others[(i+1)%3].Public()}
			refused("signatures is by a key")
		})
	}
}

// TestSignatureOfWhatIsHere: an image that was pulled before there was a
// policy gets its signature when the policy comes; one of this platform's
// manifest counts as well; a registry that does not answer is told as such.
func TestSignatureOfWhatIsHere(t *testing.T) {
	needRoot(t)
	keys, public := newKeys(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("a", "b")))
	h := newHub(t)
	push(t, h.srv.URL, "app", "1", nil, m, makeImage(t, Platform{"linux", "s390x", ""}, gzipped))
	p := testPuller(t, testStore(t), registry.Config{})
	req := ask(h.host+"/app:1", "IfNotPresent")
	if _, err := p.Image(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	req.SignedBy = public
	h.setFault(answer(".sig", 429, map[string][]string{"Retry-After": {"77"}}, ""))
	_, err := p.Image(t.Context(), req, nil)
	if reason(err) != ReasonSignature || !strings.Contains(err.Error(), "cannot be fetched") || !strings.Contains(err.Error(), "1m17s") {
		t.Errorf("%v", err)
	}
	h.setFault(nil)
	push(t, h.srv.URL, "app", signatureTag(m.manifest), nil, signatureOf(t, m.manifest, keys[0]))
	if _, err := p.Image(t.Context(), req, nil); err != nil {
		t.Error(err)
	}
}

// TestSignatureOfModule: a Wasm artifact's, too.
func TestSignatureOfModule(t *testing.T) {
	keys, public := newKeys(t)
	h := newHub(t)
	m := &made{blobs: map[string][]byte{}}
	man := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: m.add([]byte(`{}`)), Layers: []v1.Descriptor{m.add([]byte("\x00asm\x01\x00\x00\x00"))}}
	man.Config.MediaType, man.Layers[0].MediaType = wasmConfig, wasmLayer
	raw := mustJSON(t, &man)
	m.manifest = digestOf(raw)
	m.blobs[m.manifest] = raw
	push(t, h.srv.URL, "mod", "1", nil, m)
	p := testPuller(t, testStore(t), registry.Config{})
	req := ask(h.host+"/mod:1", "IfNotPresent")
	req.SignedBy = public
	if _, err := p.Module(t.Context(), req, nil); reason(err) != ReasonSignature {
		t.Errorf("%v", err)
	}
	push(t, h.srv.URL, "mod", signatureTag(m.manifest), nil, signatureOf(t, m.manifest, keys[1]))
	if got, err := p.Module(t.Context(), req, nil); err != nil || got.Digest != m.manifest {
		t.Error(got, err)
	}
}

// TestSignaturesAreImported: from an archive as cosign save writes it.
func TestSignaturesAreImported(t *testing.T) {
	needRoot(t)
	keys, public := newKeys(t)
	m := makeImage(t, amd64(), gzipped, tarOf(t, file("a", "b")))
	sig := signatureOf(t, m.manifest, keys[2])
	ix := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	var files []entry
	for i, x := range []*made{m, sig} {
		d := x.descriptor()
		if i == 0 {
			d.Annotations = map[string]string{"kind": "dev.cosignproject.cosign/image"}
		} else {
			d.Annotations = map[string]string{"kind": "dev.cosignproject.cosign/sigs"}
		}
		d.MediaType, d.Platform = types.OCIManifestSchema1, nil
		ix.Manifests = append(ix.Manifests, d)
		for digest, b := range x.blobs {
			files = append(files, entry{name: "blobs/sha256/" + hexOf(digest), content: string(b), kind: tar.TypeReg, mode: 0o644})
		}
	}
	text, err := json.Marshal(&ix)
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, file("index.json", string(text)), file("oci-layout", `{"imageLayoutVersion":"1.0.0"}`))
	s := testStore(t)
	got, err := s.Import(t.Context(), "registry.example/app:1", bytes.NewReader(tarOf(t, files...)), nil)
	if err != nil || len(got) != 2 || !got[1].Signature || got[1].Digest != m.manifest {
		t.Fatalf("%+v, %v", got, err)
	}
	req := ask("registry.example/app:1", "Never")
	req.SignedBy = public
	if _, err := testPuller(t, s, registry.Config{}).Image(t.Context(), req, nil); err != nil {
		t.Error(err)
	}
	if s, err := Open(s.cfg); err != nil || len(s.signatures(m.manifest)) != 1 {
		t.Errorf("opened again: %v", err)
	}
}
