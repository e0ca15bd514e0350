package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/wasm"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func (a *app) importCmd() *cobra.Command {
	var o nodeOptions
	c := &cobra.Command{
		Use:   "import [NAME] FILE",
		Short: "Give this node a module or an image from a file",
		Long: `Give this node a module or an image from a file.

FILE is a WebAssembly module, which needs the NAME that manifests use as image;
or an archive of images in the OCI layout or as docker save writes it,
compressed or not, which brings its names. '-' reads standard input.

A module is compiled and an image unpacked now, so that pods start at once;
only then does the name stand for it. What was imported is never removed to
make room. Run it on every node that shall run it.`,
		Example: `  dunlin import hello.wasm ./hello.wasm     # then: image: hello.wasm
  docker save app:1 | dunlin import -       # then: image: app:1`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) == 2 {
				if name = args[0]; name == "" {
					return usagef("the module needs a name: dunlin import hello.wasm ./hello.wasm")
				}
				if pathLike(name) {
					return usagef("%s is a path, and the NAME that manifests use as image is wanted: dunlin import hello.wasm %s", name, args[1])
				}
			}
			return a.importFile(cmd.Context(), o, name, args[len(args)-1])
		},
	}
	o.add(c)
	return c
}

// pathLike says whether a name leads somewhere, as no image's does.
func pathLike(name string) bool {
	parts := strings.Split(name, "/")
	return parts[0] == "" || slices.Contains(parts, "..") || slices.Contains(parts, ".")
}

// localStores are what commands on the machine itself work with; the agent
// may use the same at the same time.
type localStores struct {
	rt *wasm.Runtime
	*nodeImages
}

func openStores(o nodeOptions) (*localStores, error) {
	log := slog.New(slog.DiscardHandler)
	n, err := openImages(o, log)
	if err != nil {
		return nil, err
	}
	rt, err := wasm.New(wasm.Config{StateDir: filepath.Join(o.state, "wasm"), RunDir: filepath.Join(o.run, "wasm"), Fetcher: n.puller, Logger: log})
	if err != nil {
		return nil, err
	}
	return &localStores{rt, n}, nil
}

func (l *localStores) close() {
	_ = l.rt.Close()
	l.client.Close()
}

func (a *app) importFile(ctx context.Context, o nodeOptions, name, file string) error {
	if file == "" {
		return usagef("name the file to import, or - for standard input")
	}
	if err := o.check(); err != nil {
		return err
	}
	l, err := openStores(o)
	if err != nil {
		return err
	}
	defer l.close()
	in, source := interruptible(ctx, a.in), ""
	if file != "-" {
		f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO is refused, not waited for
		if err != nil {
			return fmt.Errorf("import: %w", err)
		}
		defer func() { _ = f.Close() }()
		if st, err := f.Stat(); err == nil && !st.Mode().IsRegular() {
			return fmt.Errorf("import: %s is not a regular file", file)
		}
		in = f
		if source, err = filepath.Abs(file); err != nil {
			return fmt.Errorf("import: %w", err)
		}
	}
	const peek = 512
	b := bufio.NewReaderSize(in, peek)
	head, _ := b.Peek(peek)
	progress := func(m string) { a.notef("%s %s ...\n", m, name) }
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case isArchive(head):
		err = a.importArchive(ctx, l, name, b)
	case name == "" && bytes.HasPrefix(head, []byte("\x00asm")):
		err = usagef("%s is a WebAssembly module and needs a name: dunlin import NAME %s", file, file)
	case name == "":
		err = fmt.Errorf("%s is neither an archive of images (a tar) nor a WebAssembly module; nothing was imported", file)
	default:
		var st workload.ImageState
		if st, err = l.rt.Import(ctx, name, source, b, progress); err == nil {
			a.printf("%s %s (%d bytes)\n", name, st.Digest, st.Size)
		}
	}
	if err != nil {
		if name == "" {
			name = file
		}
		if source != "" && !strings.Contains(err.Error(), file) {
			err = fmt.Errorf("%s: %w", file, err)
		}
		return interrupted(ctx, err, name+" was not imported")
	}
	if _, err := os.Stat(agentSocket(o.run)); err != nil {
		if os.Geteuid() != 0 && client.RootAgent() {
			a.notef("Note: root's agent runs here, and does not use what another user imports: try sudo.\n")
		}
		a.notef("Note: no agent runs here with --run-dir %s; what was imported is in %s for one that is started with that --state-dir.\n", o.run, o.state)
	}
	return nil
}

// isArchive knows tar, gzip and zstd by their first bytes.
func isArchive(head []byte) bool {
	const ustar = 257
	return bytes.HasPrefix(head, []byte{0x1f, 0x8b}) || bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}) ||
		len(head) > ustar+5 && string(head[ustar:ustar+5]) == "ustar"
}

func (a *app) importArchive(ctx context.Context, l *localStores, name string, r io.Reader) error {
	got, err := l.store.Import(ctx, name, r, func(m string) { a.notef("%s ...\n", m) })
	for _, i := range got {
		if i.Signature {
			a.printf("signature of %s\n", i.Digest)
			continue
		}
		names := i.Names
		if len(names) == 0 {
			names = []string{i.Digest}
		}
		a.printf("%s %s (%d bytes)\n", strings.Join(names, " "), i.Digest, i.Size)
		if i.Module && err == nil {
			// Compiled now, as every module that is imported.
			_, err = l.rt.Prepare(ctx, workload.ImageRequest{Image: names[0], Policy: "Never"}, func(m string) { a.notef("%s %s ...\n", m, names[0]) })
		}
	}
	return err
}

func (a *app) exportCmd() *cobra.Command {
	var o nodeOptions
	c := &cobra.Command{
		Use:   "export IMAGE... FILE",
		Short: "Write images or a module of this node to a file, for another node",
		Long: `Write images or a module of this node to a file, for another node.

Images become one archive in the OCI layout, with their digests, that
'dunlin import' and docker load read; a module that was imported under a name
becomes a .wasm file again. '-' writes to standard output.`,
		Example: `  dunlin export registry.example/app:1 app.tar
  dunlin export app:1 - | ssh node2 dunlin import -`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.export(cmd.Context(), o, args[:len(args)-1], args[len(args)-1])
		},
	}
	o.add(c)
	return c
}

// export writes beside the file first: a file of that name is whole.
func (a *app) export(ctx context.Context, o nodeOptions, names []string, file string) (err error) {
	if err := o.check(); err != nil {
		return err
	}
	l, err := openStores(o)
	if err != nil {
		return err
	}
	defer l.close()
	write := func(w io.Writer) error { return l.store.Export(ctx, w, names...) }
	if digest := l.moduleNamed(names[0]); digest != "" {
		if len(names) > 1 {
			return usagef("%s is a module, and a file holds one: export it alone", names[0])
		}
		write = func(w io.Writer) error { return l.exportModule(ctx, w, digest, names[0]) }
	}
	if file == "-" {
		return interrupted(ctx, write(a.out), "not all was exported")
	}
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".tmp*")
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	defer func() {
		_ = f.Close()
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	if err := write(f); err != nil {
		return interrupted(ctx, err, "nothing was exported")
	}
	if err := errors.Join(f.Chmod(0o644), f.Sync(), os.Rename(f.Name(), file)); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	a.printf("%s\n", file)
	return nil
}

// moduleNamed is the digest of the module that was imported under a name.
func (l *localStores) moduleNamed(name string) (digest string) {
	_ = l.rt.Store().Named(func(n, d string, _ int64, _ time.Time) {
		if n == name {
			digest = d
		}
	})
	return digest
}

func (l *localStores) exportModule(ctx context.Context, w io.Writer, digest, name string) error {
	f, err := l.rt.Store().Open(ctx, digest, name)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if _, err := io.Copy(w, f); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	return nil
}

func (a *app) imagesCmd() *cobra.Command {
	var o nodeOptions
	c := &cobra.Command{
		Use:   "images",
		Short: "List the images and modules of this node",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if !fileThere(filepath.Join(o.state, "images")) { // and nothing is made by looking
				a.noteRoots(o)
				return fmt.Errorf("no node has its state in %s: name another folder with --state-dir, or 'dunlin import' something", o.state)
			}
			l, err := openStores(o)
			if err != nil {
				return err
			}
			defer l.close()
			a.noteRoots(o)
			return a.listImages(l)
		},
	}
	o.add(c)
	var r nodeOptions
	rm := &cobra.Command{
		Use:   "rm IMAGE...",
		Short: "Take names off images and modules of this node",
		Long: `Take names off images and modules of this node.

What a name stood for keeps its space until the disk needs it (--image-gc-high),
so nothing is taken from a container that runs; and it can be removed then.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			l, err := openStores(r)
			if err != nil {
				return err
			}
			defer l.close()
			var errs []error
			for _, name := range args {
				errs = append(errs, a.forget(l, name))
			}
			if errors.Join(errs...) != nil {
				a.noteRoots(r)
			}
			return errors.Join(errs...)
		},
	}
	r.add(rm)
	c.AddCommand(rm)
	return c
}

// noteRoots says to a user without an agent that root's has its own images.
func (a *app) noteRoots(o nodeOptions) {
	if os.Geteuid() != 0 && !fileThere(agentSocket(o.run)) && client.RootAgent() {
		a.notef("Note: these are your images, in %s; root's agent runs here and has its own: try sudo.\n", o.state)
	}
}

func (a *app) forget(l *localStores, name string) error {
	err := l.rt.Store().Forget(name)
	if errors.Is(err, fs.ErrNotExist) {
		err = l.store.Forget(name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no image or module of this node is called %s ('dunlin images' lists them)", name)
	}
	if err != nil {
		return err
	}
	a.printf("%s removed\n", name)
	return nil
}

func (a *app) listImages(l *localStores) error {
	list, err := l.store.List()
	if err != nil {
		return err
	}
	if err := l.rt.Store().Named(func(name, digest string, size int64, at time.Time) {
		list = append(list, images.Listed{Name: name, Digest: digest, Size: size, AddedAt: at, Module: true, Whole: true, Imported: !strings.HasPrefix(name, "file://")})
	}); err != nil {
		return err
	}
	slices.SortFunc(list, func(a, b images.Listed) int { return strings.Compare(a.Name, b.Name) })
	w := tabwriter.NewWriter(a.out, 0, 0, 3, ' ', 0)
	_, _ = fmt.Fprintln(w, "NAME\tKIND\tDIGEST\tSIZE\tFROM")
	for _, i := range list {
		kind, from := "image", "registry"
		if i.Module {
			kind = "module"
		}
		switch {
		case i.Imported:
			from = "import"
		case strings.HasPrefix(i.Name, "file://"):
			from = "file"
		}
		if !i.Whole {
			kind += " (incomplete)"
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%.19s\t%.1f MiB\t%s\n", i.Name, kind, i.Digest, float64(i.Size)/(1<<20), from)
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("list: %w", err)
	}
	return nil
}

// interruptible makes reads of a terminal or pipe end with the context: a
// blocked read(2) does not.
func interruptible(ctx context.Context, r io.Reader) io.Reader {
	f, ok := r.(*os.File)
	if !ok {
		return r
	}
	return &polledReader{ctx, f}
}

type polledReader struct {
	ctx context.Context //nolint:containedctx // a reader has no other way
	f   *os.File
}

// pollEvery is how soon the end of the context is seen, in milliseconds.
const pollEvery = 100

func (p *polledReader) Read(b []byte) (int, error) {
	fds := []unix.PollFd{{Fd: int32(p.f.Fd()), Events: unix.POLLIN}}
	for {
		if err := p.ctx.Err(); err != nil {
			return 0, context.Cause(p.ctx)
		}
		n, err := unix.Poll(fds, pollEvery)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return 0, fmt.Errorf("standard input: %w", err)
		}
		if n > 0 {
			return p.f.Read(b)
		}
	}
}
