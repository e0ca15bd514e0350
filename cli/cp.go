package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

func (a *app) cpCmd() *cobra.Command {
	var container string
	c := &cobra.Command{
		Use:   "cp (FILE POD:FILE | POD:FILE FILE)",
		Short: "Copy files and folders into or out of a container",
		Long: `Copy files and folders into or out of a container.

As cp -r does, it copies into a target that is a folder, and else to that name.
The container must have tar. Links out of a container are left out, with a note.
A local name with a colon is written as ./NAME.`,
		Example: `  dunlin cp page.html web:/www/index.html
  dunlin cp web:/var/log ./logs -c side`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cp(cmd.Context(), args[0], args[1], container)
		},
	}
	c.Flags().StringVarP(&container, "container", "c", "", "container (default: that of the annotation kubectl.kubernetes.io/default-container, or the first)")
	return a.namespaced(c)
}

// podFile splits POD:FILE; pod is "" for a local file.
func podFile(arg string) (pod, file string) {
	before, after, ok := strings.Cut(arg, ":")
	if !ok || before == "" || before[0] == '.' || strings.Contains(before, "/") {
		return "", arg
	}
	return before, after
}

func (a *app) cp(ctx context.Context, from, to, container string) error {
	fromPod, from := podFile(from)
	toPod, to := podFile(to)
	if (fromPod == "") == (toPod == "") || from == "" || to == "" {
		return usagef("one of both is in a pod, POD:FILE, and the other is a local file")
	}
	c, p, err := a.pod(ctx, fromPod+toPod)
	if err != nil {
		return err
	}
	if ct := a.container(p, container); ct != nil {
		container = ct.Name
	}
	x := &copying{a: a, c: c, pod: p, container: container}
	if toPod != "" {
		return x.into(ctx, from, to)
	}
	return x.out(ctx, from, to)
}

// copying goes by way of tar in the container.
type copying struct {
	a         *app
	c         *client.Client
	pod       *corev1.Pod
	container string
}

func (x *copying) run(ctx context.Context, con *client.Console, command ...string) error {
	con.Err = x.a.errw
	if con.Out == nil {
		con.Out = io.Discard
	}
	return x.a.remote(ctx, x.c, x.pod, "exec", x.container, command, con)
}

// tarFailed says whose exit code it was.
func tarFailed(err error) error {
	var code exitCode
	if errors.As(err, &code) {
		return fmt.Errorf("tar in the container failed with exit code %d", int(code))
	}
	return err
}

func (x *copying) into(ctx context.Context, from, to string) error {
	if _, err := os.Stat(from); err != nil {
		return err
	}
	from, err := filepath.Abs(from) // so that "." has a name
	if err != nil {
		return err
	}
	var no exitCode
	switch err := x.run(ctx, &client.Console{}, "test", "-d", to); {
	case err == nil:
		to = path.Join(to, filepath.Base(from))
	case !errors.As(err, &no):
		return err
	}
	r, w := io.Pipe()
	defer func() { _ = r.Close() }() // ends the packing
	go func() { _ = w.CloseWithError(pack(w, from, path.Base(to))) }()
	return tarFailed(x.run(ctx, &client.Console{In: r}, "tar", "xmf", "-", "-C", path.Dir(to)))
}

// pack writes file, or all that is in a folder, under the name.
func pack(w io.Writer, file, name string) error {
	tw := tar.NewWriter(w)
	err := filepath.Walk(file, func(at string, info fs.FileInfo, err error) error {
		if err != nil {
			return err
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(at); err != nil {
				return err
			}
		} else if !info.IsDir() && !info.Mode().IsRegular() {
			return fmt.Errorf("%s is neither a file nor a folder nor a link", at)
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(file, at)
		if err != nil {
			return err
		}
		h.Name = path.Join(name, filepath.ToSlash(rel))
		h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", "" // those of this machine mean nothing there
		if err := tw.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		f, err := os.Open(at)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		_, err = io.Copy(tw, f)
		return err
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func (x *copying) out(ctx context.Context, from, to string) error {
	from = path.Clean(from)
	dir, base := path.Dir(from), path.Base(from)
	if base == "/" {
		base = "."
	}
	if info, err := os.Stat(to); err == nil && info.IsDir() {
		to = filepath.Join(to, base)
	}
	to, err := filepath.Abs(to)
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(filepath.Dir(to)) // out of which no name leads
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := x.unpack(r, root, base, filepath.Base(to))
		_ = r.CloseWithError(err)
		done <- err
	}()
	err = tarFailed(x.run(ctx, &client.Console{Out: w}, "tar", "cf", "-", "-C", dir, base))
	_ = w.CloseWithError(err)
	if uerr := <-done; err == nil {
		return uerr
	}
	return err
}

// unpack writes what is named from, or stands below it, as to in root.
func (x *copying) unpack(r io.Reader, root *os.Root, from, to string) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, r) // what tar pads with
			return err
		}
		if err != nil {
			return fmt.Errorf("read what tar in the container wrote: %w", err)
		}
		name := path.Clean("/" + h.Name)[1:] // ".." leads nowhere
		rel, ok := strings.CutPrefix(name, from)
		if from == "." {
			rel, ok = name, true
		}
		if !ok || from != "." && rel != "" && rel[0] != '/' {
			return fmt.Errorf("tar in the container wrote %q, which was not asked for", h.Name)
		}
		name = path.Join(to, rel)
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, h.FileInfo().Mode().Perm()|0o700)
		case tar.TypeReg:
			err = unpackFile(root, name, h.FileInfo().Mode().Perm(), tr)
		default:
			x.a.notef("Note: %s is neither a file nor a folder: left out\n", h.Name)
		}
		if err != nil {
			return err
		}
	}
}

func unpackFile(root *os.Root, name string, mode fs.FileMode, r io.Reader) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}
