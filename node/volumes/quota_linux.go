package volumes

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrNoQuota says that the file system cannot limit a folder.
var ErrNoQuota = errors.New("the file system has no project quotas (ext4 or xfs, mounted with prjquota)")

// Constants of linux/fs.h and linux/quota.h that x/sys does not have.
const (
	fsIocGetXattr   = 0x801c581f // FS_IOC_FSGETXATTR
	fsIocSetXattr   = 0x401c5820 // FS_IOC_FSSETXATTR
	xflagProjInh    = 0x200      // FS_XFLAG_PROJINHERIT
	projectQuota    = 2          // PRJQUOTA
	qSetQuota       = 0x800008   // Q_SETQUOTA
	quotaBlockHard  = 1          // QIF_BLIMITS: soft and hard limit of blocks
	quotaBlock      = 1024       // bytes of a block of limits
	firstProject    = 0x44000000 // ours; below are people's own
	sysQuotactlFD   = 443        // quotactl_fd(2), Linux 5.14, on every processor
	subCommandShift = 8
)

// fsxattr is struct fsxattr.
type fsxattr struct {
	xflags, extsize, nextents, projid, cowextsize uint32
	_                                             [8]byte
}

// dqblk is struct if_dqblk.
type dqblk struct {
	bhard, bsoft, curspace, ihard, isoft, curinodes, btime, itime uint64
	valid                                                         uint32
	_                                                             uint32
}

// limitFolder gives a folder a project of its own and limits that to size
// bytes. The project's number stands in the folder itself, so nothing else
// has to remember it; a new one is above those of all its neighbours.
func limitFolder(around, dir string, size int64) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: it needs root", ErrNoQuota)
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	x, err := getProject(f)
	if err != nil {
		return err
	}
	if x.projid < firstProject || x.xflags&xflagProjInh == 0 {
		if x.projid < firstProject {
			if x.projid, err = nextProject(around); err != nil {
				return err
			}
		}
		x.xflags |= xflagProjInh
		if err := ioctl(f, fsIocSetXattr, unsafe.Pointer(&x)); err != nil {
			return quotaError("give the folder a project", err)
		}
	}
	blocks := uint64(size+quotaBlock-1) / quotaBlock
	q := dqblk{bhard: blocks, bsoft: blocks, valid: quotaBlockHard}
	_, _, errno := unix.Syscall6(sysQuotactlFD, f.Fd(), qSetQuota<<subCommandShift&0xffffffff|projectQuota, uintptr(x.projid), uintptr(unsafe.Pointer(&q)), 0, 0)
	if errno != 0 {
		return quotaError("limit the folder", errno)
	}
	return nil
}

func getProject(f *os.File) (x fsxattr, err error) {
	if err := ioctl(f, fsIocGetXattr, unsafe.Pointer(&x)); err != nil {
		return x, quotaError("read the folder's project", err)
	}
	return x, nil
}

// nextProject is a number that no volume here has. The caller's volumes are
// made one after the other, or get the same number, which shares a limit for
// as long as both exist: volumes are made under a lock.
func nextProject(around string) (uint32, error) {
	entries, err := os.ReadDir(around)
	if err != nil {
		return 0, err
	}
	next := uint32(firstProject)
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		f, err := os.Open(around + "/" + e.Name())
		if err != nil {
			continue // it may go meanwhile
		}
		x, err := getProject(f)
		_ = f.Close()
		if err == nil && x.projid >= next {
			next = x.projid + 1
		}
	}
	return next, nil
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// quotaError tells what the file system cannot do from what went wrong.
func quotaError(what string, err error) error {
	var no syscall.Errno
	if errors.As(err, &no) {
		switch no {
		case unix.ENOTTY, unix.EOPNOTSUPP, unix.ENOSYS, unix.ESRCH, unix.EINVAL, unix.ENODEV, unix.ENOTBLK:
			return fmt.Errorf("%s: %w (%w)", what, ErrNoQuota, err)
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}

func ownerOf(st os.FileInfo) (uid, gid int) {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid), int(s.Gid)
	}
	return -1, -1
}
