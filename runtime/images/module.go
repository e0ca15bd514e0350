package images

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/runtime/workload"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// moduleForm is how an artifact carries a WebAssembly module.
type moduleForm int

const (
	notModule   moduleForm = iota
	layerModule            // the first layer is the module
	imageModule            // a container image whose only file is the module
)

// Media types of modules, by who uses them.
const (
	wasmConfig    = "application/vnd.wasm.config.v0+json" // CNCF TAG Runtime, Wasm OCI artifact layout
	wasmConfigOld = "application/vnd.wasm.config.v1+json" // wasm-to-oci
	wasmLayer     = "application/wasm"
	wasmLayerOld  = "application/vnd.wasm.content.layer.v1+wasm" // wasm-to-oci, Istio, Spin
	compatMark    = "module.wasm.image/variant"                  // the compat layouts' annotation
)

// moduleOf says whether, and how, a manifest is of a module.
func moduleOf(m *v1.Manifest) moduleForm {
	if len(m.Layers) == 0 {
		return notModule
	}
	switch m.Layers[0].MediaType {
	case wasmLayer, wasmLayerOld:
		return layerModule
	}
	switch m.Config.MediaType {
	case wasmConfig, wasmConfigOld:
		return layerModule
	}
	if m.Annotations[compatMark] != "" {
		return imageModule
	}
	return notModule
}

// Module is a WebAssembly module that is here.
type Module struct {
	Digest string // of the artifact
	// File is the module itself and Content its digest, when the artifact holds
	// it as it is; both are empty when it must be taken out of an image.
	File, Content string
	Open          func() (io.ReadCloser, error)
}

// Module makes the module of an image available, by the pull policy. It is
// verified against its digest by whoever reads it, or while it is read.
// Errors are *workload.StartError.
func (p *Puller) Module(ctx context.Context, req workload.ImageRequest, progress workload.Progress) (Module, error) {
	r, err := p.resolve(ctx, req, true, progress)
	if err != nil {
		return Module{}, err
	}
	if len(r.m.Layers) == 0 {
		return Module{}, badImage(req.Image, "it has no layer, so no module")
	}
	if moduleOf(r.m) == layerModule {
		i := max(0, slices.IndexFunc(r.m.Layers, func(d v1.Descriptor) bool { return d.MediaType == wasmLayer || d.MediaType == wasmLayerOld }))
		content := r.m.Layers[i].Digest.String()
		file := p.s.blobPath(content)
		return Module{Digest: r.digest, File: file, Content: content, Open: func() (io.ReadCloser, error) { return os.Open(file) }}, nil
	}
	return Module{Digest: r.digest, Open: func() (io.ReadCloser, error) { return p.s.moduleIn(r) }}, nil
}

// moduleIn finds the module in a container image (the compat forms): the file
// that is its entry point, or its only one that ends in .wasm.
func (s *Store) moduleIn(r *resolved) (io.ReadCloser, error) {
	c, err := v1.ParseConfigFile(bytes.NewReader(r.rawConfig))
	if err != nil {
		return nil, badImage(r.name, "its config cannot be read: %v", err)
	}
	entry := ""
	if argv := slices.Concat(c.Config.Entrypoint, c.Config.Cmd); len(argv) > 0 {
		entry, _ = inside(argv[0])
	}
	for i := range slices.Backward(r.m.Layers) {
		f, err := s.findModule(r, i, entry)
		if f != nil || err != nil {
			return f, err
		}
	}
	return nil, badImage(r.name, "there is no WebAssembly module in it: no file ends in .wasm, and its entry point is %q", entry)
}

// findModule is the module in one layer, or nil.
func (s *Store) findModule(r *resolved, i int, entry string) (io.ReadCloser, error) {
	f, err := os.Open(s.blobPath(r.m.Layers[i].Digest.String()))
	if err != nil {
		return nil, badImage(r.name, "layer %s: %v", r.m.Layers[i].Digest, err)
	}
	plain, done, err := decompress(f)
	if err != nil {
		_ = f.Close()
		return nil, badImage(r.name, "layer %s: %v", r.m.Layers[i].Digest, err)
	}
	closeAll := func() {
		done()
		_ = f.Close()
	}
	for t := tar.NewReader(plain); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			closeAll()
			return nil, nil //nolint:nilnil // none here
		}
		if err != nil {
			closeAll()
			return nil, badImage(r.name, "layer %s: %v", r.m.Layers[i].Digest, err)
		}
		name, ok := inside(h.Name)
		if ok && h.Typeflag == tar.TypeReg && (name == entry || strings.HasSuffix(name, ".wasm")) {
			return &inArchive{t, closeAll}, nil
		}
	}
}

type inArchive struct {
	io.Reader
	done func()
}

func (r *inArchive) Close() error {
	r.done()
	return nil
}
