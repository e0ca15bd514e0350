package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/tetratelabs/wazero/experimental/sys"
	wsys "github.com/tetratelabs/wazero/sys"
)

// wazero's own folder mounts follow symbolic links out of the folder. These
// go through os.Root, which resolves every path component below the folder's
// descriptor, on every kernel, whatever a neighbour that shares the volume
// does meanwhile. Roots are opened before the process gives up its
// privileges, so the folders above need not be passable for it.

// rootFS is one mounted folder.
type rootFS struct {
	sys.UnimplementedFS
	root     *os.Root
	readOnly bool
	// only, when not nil, are the entries that exist for the guest: mounts
	// of single files.
	only map[string]fileRef
}

// fileRef is one mounted file: the host's name may differ from the guest's.
type fileRef struct {
	root *os.Root
	name string
}

// preopen is a mount as the guest sees it.
type preopen struct {
	path string
	fs   *rootFS
}

// openMounts opens all mounts in the order of their targets. Single files
// become a folder that holds only them.
func openMounts(mounts []Mount) ([]preopen, error) {
	var out []preopen
	byPath := map[string]*rootFS{}
	for _, m := range mounts {
		st, err := os.Stat(m.Source)
		if err != nil {
			return nil, fmt.Errorf("mount %s: %w", m.Target, err)
		}
		target := path.Clean("/" + strings.TrimPrefix(m.Target, "/"))
		if st.IsDir() {
			r, err := os.OpenRoot(m.Source)
			if err != nil {
				return nil, fmt.Errorf("mount %s: %w", m.Target, err)
			}
			out = append(out, preopen{target, &rootFS{root: r, readOnly: m.ReadOnly}})
			continue
		}
		dir, name := path.Split(target)
		dir = path.Clean(dir)
		f := byPath[dir]
		if f == nil {
			f = &rootFS{only: map[string]fileRef{}, readOnly: true}
			byPath[dir] = f
			out = append(out, preopen{dir, f})
		}
		src := path.Clean(m.Source)
		r, err := os.OpenRoot(path.Dir(src))
		if err != nil {
			return nil, fmt.Errorf("mount %s: %w", m.Target, err)
		}
		f.only[name] = fileRef{r, path.Base(src)}
		f.readOnly = f.readOnly && m.ReadOnly
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].path < out[j].path })
	return out, nil
}

// at finds the root and the path below it for a guest's path.
func (f *rootFS) at(p string) (*os.Root, string, sys.Errno) {
	p = strings.TrimSuffix(p, "/")
	if p == "" {
		p = "."
	}
	if f.only == nil {
		return f.root, p, 0
	}
	ref, ok := f.only[p]
	if !ok {
		return nil, "", sys.ENOENT
	}
	return ref.root, ref.name, 0
}

func (f *rootFS) write(p string) (*os.Root, string, sys.Errno) {
	if f.readOnly {
		return nil, "", sys.EROFS
	}
	return f.at(p)
}

// OpenFile implements sys.FS.
func (f *rootFS) OpenFile(p string, flag sys.Oflag, perm fs.FileMode) (sys.File, sys.Errno) {
	writes := flag&(sys.O_RDWR|sys.O_WRONLY|sys.O_APPEND|sys.O_CREAT|sys.O_TRUNC) != 0
	if f.only != nil && (p == "." || p == "/") {
		return &filesDir{fs: f}, 0
	}
	r, p, errno := f.at(p)
	if errno != 0 {
		return nil, errno
	}
	if writes && f.readOnly {
		return nil, sys.EROFS
	}
	file, err := r.OpenFile(p, osFlags(flag), perm&0o777)
	if err != nil {
		return nil, pathErrno(err)
	}
	return &osFile{f: file, append: flag&sys.O_APPEND != 0, readOnly: f.readOnly}, 0
}

func osFlags(flag sys.Oflag) int {
	var o int
	switch {
	case flag&sys.O_RDWR != 0:
		o = os.O_RDWR
	case flag&sys.O_WRONLY != 0:
		o = os.O_WRONLY
	}
	for _, m := range []struct {
		from sys.Oflag
		to   int
	}{
		{sys.O_APPEND, os.O_APPEND},
		{sys.O_CREAT, os.O_CREATE},
		{sys.O_DIRECTORY, syscall.O_DIRECTORY},
		{sys.O_DSYNC, syscall.O_DSYNC},
		{sys.O_EXCL, os.O_EXCL},
		{sys.O_NOFOLLOW, syscall.O_NOFOLLOW},
		{sys.O_SYNC, os.O_SYNC},
		{sys.O_TRUNC, os.O_TRUNC},
	} {
		if flag&m.from != 0 {
			o |= m.to
		}
	}
	// A fifo in a volume must not hang the open.
	return o | syscall.O_NONBLOCK
}

// pathErrno maps os.Root's errors, of which leaving the root is none of the
// operating system's.
func pathErrno(err error) sys.Errno {
	var e syscall.Errno
	if err != nil && !errors.As(err, &e) {
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrExist), errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrInvalid):
		default:
			return sys.EPERM
		}
	}
	return errnoOf(err)
}

// Stat implements sys.FS.
func (f *rootFS) Stat(p string) (wsys.Stat_t, sys.Errno) {
	if f.only != nil && (p == "." || p == "/") {
		return wsys.Stat_t{Mode: fs.ModeDir | 0o555}, 0
	}
	r, p, errno := f.at(p)
	if errno != 0 {
		return wsys.Stat_t{}, errno
	}
	info, err := r.Stat(p)
	if err != nil {
		return wsys.Stat_t{}, pathErrno(err)
	}
	return wsys.NewStat_t(info), 0
}

// Lstat implements sys.FS.
func (f *rootFS) Lstat(p string) (wsys.Stat_t, sys.Errno) {
	if f.only != nil {
		return f.Stat(p)
	}
	info, err := f.root.Lstat(strings.TrimSuffix(p, "/"))
	if err != nil {
		return wsys.Stat_t{}, pathErrno(err)
	}
	return wsys.NewStat_t(info), 0
}

// Mkdir implements sys.FS.
func (f *rootFS) Mkdir(p string, perm fs.FileMode) sys.Errno {
	r, p, errno := f.write(p)
	if errno != 0 {
		return errno
	}
	return pathErrno(r.Mkdir(p, perm&0o777))
}

// Chmod implements sys.FS.
func (f *rootFS) Chmod(p string, perm fs.FileMode) sys.Errno {
	r, p, errno := f.write(p)
	if errno != 0 {
		return errno
	}
	return pathErrno(r.Chmod(p, perm&0o777))
}

// Rename implements sys.FS.
func (f *rootFS) Rename(from, to string) sys.Errno {
	if f.only != nil {
		return sys.EPERM
	}
	r, from, errno := f.write(from)
	if errno != 0 {
		return errno
	}
	return pathErrno(r.Rename(from, strings.TrimSuffix(to, "/")))
}

// Rmdir implements sys.FS.
func (f *rootFS) Rmdir(p string) sys.Errno { return f.remove(p, true) }

// Unlink implements sys.FS.
func (f *rootFS) Unlink(p string) sys.Errno { return f.remove(p, false) }

func (f *rootFS) remove(p string, dir bool) sys.Errno {
	if f.only != nil {
		return sys.EPERM
	}
	r, p, errno := f.write(p)
	if errno != 0 {
		return errno
	}
	info, err := r.Lstat(p)
	switch {
	case err != nil:
		return pathErrno(err)
	case dir && !info.IsDir():
		return sys.ENOTDIR
	case !dir && info.IsDir():
		return sys.EISDIR
	}
	return pathErrno(r.Remove(p))
}

// Link and Symlink are refused: a link that a guest makes in a volume would
// be followed by whatever else reads that volume, with more rights.
func (f *rootFS) Link(string, string) sys.Errno { return sys.EPERM }

// Symlink implements sys.FS.
func (f *rootFS) Symlink(string, string) sys.Errno { return sys.EPERM }

// Readlink implements sys.FS.
func (f *rootFS) Readlink(p string) (string, sys.Errno) {
	r, p, errno := f.at(p)
	if errno != 0 {
		return "", errno
	}
	s, err := r.Readlink(p)
	return s, pathErrno(err)
}

// Utimens implements sys.FS.
func (f *rootFS) Utimens(p string, atim, mtim int64) sys.Errno {
	r, p, errno := f.write(p)
	if errno != 0 {
		return errno
	}
	return pathErrno(r.Chtimes(p, fileTime(atim), fileTime(mtim)))
}

// fileTime is the zero time for "leave it".
func fileTime(ns int64) time.Time {
	if ns == sys.UTIME_OMIT {
		return time.Time{}
	}
	return time.Unix(0, ns)
}

// filesDir lists the single files of a rootFS.
type filesDir struct {
	sys.UnimplementedFile
	fs   *rootFS
	done bool
}

func (d *filesDir) IsDir() (bool, sys.Errno)       { return true, 0 }
func (d *filesDir) Stat() (wsys.Stat_t, sys.Errno) { return d.fs.Stat(".") }
func (d *filesDir) Seek(off fileOffset, whence int) (int64, sys.Errno) {
	if off != 0 || whence != 0 {
		return 0, sys.EINVAL
	}
	d.done = false
	return 0, 0
}
func (d *filesDir) Close() sys.Errno { return 0 }

func (d *filesDir) Readdir(int) ([]sys.Dirent, sys.Errno) {
	if d.done {
		return nil, 0
	}
	d.done = true
	out := make([]sys.Dirent, 0, len(d.fs.only))
	for name := range d.fs.only {
		out = append(out, sys.Dirent{Name: name})
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Name < out[j].Name })
	return out, 0
}
