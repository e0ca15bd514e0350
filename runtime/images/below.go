package images

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A layer is a difference to the layers below it, and need not name the
// folders that are there: "bin/tool" may stand alone in it, where "bin" is a
// link to "usr/bin" in the image that it was built on. On a mount of the
// layers below, as other programs unpack, the kernel finds that out; here view
// does, so that nothing is mounted, and one unpacked layer serves all images
// in which it means the same.

// view is what a stack of unpacked layers, the top one first, looks like.
type view []string

// chainKey names a layer together with all that are below it; the last diff id
// is its own.
func chainKey(diffIDs []string) string {
	h := sha256.Sum256([]byte("chain\n" + strings.Join(diffIDs, "\n")))
	return digestPrefix + hex.EncodeToString(h[:])
}

// lookup finds a file by a path without links in it; at is "" where there is
// none.
func (v view) lookup(name string) (st fs.FileInfo, at string, err error) {
	dirs, cur := v, ""
	parts := strings.Split(name, "/")
	for i, part := range parts {
		cur = path.Join(cur, part)
		st, at = nil, ""
		var next view
	layers:
		for _, d := range dirs {
			p := path.Join(d, cur)
			one, err := os.Lstat(p)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				continue
			case err != nil:
				return nil, "", err
			case isWhiteout(one):
				break layers
			case st == nil:
				st, at = one, p
			}
			if !one.IsDir() {
				break
			}
			next = append(next, d)
			if opaque(p) {
				break
			}
		}
		if st == nil || i < len(parts)-1 && !st.IsDir() {
			return nil, "", nil
		}
		dirs = next
	}
	return st, at, nil
}

func opaque(dir string) bool {
	var b [1]byte
	n, err := unix.Lgetxattr(dir, "trusted.overlay.opaque", b[:])
	return err == nil && n == 1 && b[0] == 'y'
}

// fits says whether a layer that was unpacked on its own is right on top of
// these: no folder that it has only because something is in it hides a link,
// or has another owner or mode there.
func (v view) fits(implicit []string) bool {
	for _, name := range implicit {
		st, at, err := v.lookup(name)
		if err != nil || at != "" && !plainFolder(st) {
			return false
		}
	}
	return true
}

// plainFolder says whether it is one as the unpacker makes it.
func plainFolder(st fs.FileInfo) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && st.IsDir() && sys.Mode&0o7777 == 0o755 && sys.Uid == 0 && sys.Gid == 0
}

// mostLinks is where a path counts as a circle (the kernel's MAXSYMLINKS).
const mostLinks = 40

// folder follows the links of a path, of this layer and of those below it, and
// makes sure that the folder that it leads to is in this layer. Nothing leads
// out: the layer is the root of links and of "..".
func (u *unpacker) folder(dir string) (string, error) {
	done, links := ".", 0
	for parts := strings.Split(dir, "/"); len(parts) > 0; {
		part := parts[0]
		parts = parts[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = path.Dir(done)
			continue
		}
		at := path.Join(done, part)
		link, err := u.step(at)
		if err != nil {
			return "", err
		}
		if link == "" {
			done = at
			continue
		}
		if links++; links > mostLinks {
			return "", fmt.Errorf("%s: %w", at, unix.ELOOP)
		}
		if path.IsAbs(link) {
			done = "."
		}
		parts = append(strings.Split(link, "/"), parts...)
	}
	return done, nil
}

// step makes sure that one folder is in this layer, or says where the link
// leads that is there instead.
func (u *unpacker) step(at string) (link string, err error) {
	own, err := u.root.Lstat(at)
	switch {
	case err == nil && own.IsDir():
		return "", nil
	case err == nil && own.Mode()&fs.ModeSymlink != 0:
		return u.root.Readlink(at)
	case err == nil && isWhiteout(own):
		if err := u.root.Remove(at); err != nil {
			return "", err
		}
		if err := u.root.Mkdir(at, 0o755); err != nil {
			return "", err
		}
		return "", u.opaque(at)
	case err == nil:
		return "", fmt.Errorf("%s: %w", at, unix.ENOTDIR)
	case !errors.Is(err, fs.ErrNotExist):
		return "", err
	}
	st, below, err := u.merged().lookup(at)
	if err != nil {
		return "", err
	}
	if below == "" || plainFolder(st) {
		u.implicit = append(u.implicit, at)
		return "", u.root.Mkdir(at, 0o755)
	}
	u.depends = true
	switch {
	case st.Mode()&fs.ModeSymlink != 0:
		return os.Readlink(below)
	case !st.IsDir():
		return "", fmt.Errorf("%s, of a layer below: %w", at, unix.ENOTDIR)
	}
	if err := u.root.Mkdir(at, 0o755); err != nil {
		return "", err
	}
	u.dirs = append(u.dirs, dirTime{at, st.ModTime()})
	return "", u.like(at, st)
}

// merged is this layer on those below it.
func (u *unpacker) merged() view { return append(view{u.root.Name()}, u.below...) }

// like gives a file the owner and mode of another.
func (u *unpacker) like(name string, st fs.FileInfo) error {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && u.owner {
		if err := u.root.Lchown(name, int(sys.Uid), int(sys.Gid)); err != nil {
			return err
		}
	}
	return u.root.Chmod(name, st.Mode()&(fs.ModePerm|fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky))
}

// copyUp brings a regular file from below into this layer: a hard link there
// is one file with two names only if both are here.
func (u *unpacker) copyUp(name string) error {
	st, below, err := u.merged().lookup(name)
	if err != nil {
		return err
	}
	if below == "" || !st.Mode().IsRegular() {
		return fmt.Errorf("%w: no such file in this layer or below", fs.ErrNotExist)
	}
	u.depends = true
	if err := u.s.room(st.Size()); err != nil {
		return err
	}
	from, err := os.Open(below)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	to, err := u.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(to, &contextReader{u.ctx, from})
	u.res.bytes += n
	if err := errors.Join(err, to.Close()); err != nil {
		return err
	}
	if err := u.like(name, st); err != nil {
		return err
	}
	return u.root.Chtimes(name, st.ModTime(), st.ModTime())
}
