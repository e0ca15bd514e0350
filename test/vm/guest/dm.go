package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The device mapper's requests (linux/dm-ioctl.h): each is a header, and for a
// table the targets behind it.
const (
	dmCreate = 0xc138fd03
	dmResume = 0xc138fd06 // DM_DEV_SUSPEND without its flag
	dmLoad   = 0xc138fd09
)

type dmHeader struct {
	Version                      [3]uint32
	DataSize, DataStart, Targets uint32
	OpenCount                    int32
	Flags, EventNumber, _        uint32
	Dev                          uint64
	Name                         [128]byte
	UUID                         [129]byte
	_                            [7]byte
}

type dmTarget struct {
	Start, Length uint64
	Status        int32
	Next          uint32
	Type          [16]byte
}

// dmDelay makes the device /dev/dm-N (counted from 0) of another one, or gives
// it another table: every flush of its cache takes that long, and with it every
// fsync.
func dmDelay(name, below string, create bool, flush time.Duration) error {
	control, err := os.OpenFile("/dev/mapper/control", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("device mapper: %w", err)
	}
	defer func() { _ = control.Close() }()
	f, err := os.Open(below)
	if err != nil {
		return fmt.Errorf("device mapper: %w", err)
	}
	size, err := f.Seek(0, 2)
	_ = f.Close()
	if err != nil {
		return fmt.Errorf("size of %s: %w", below, err)
	}
	call := func(what string, request uintptr, targets uint32, more []byte) error {
		h := dmHeader{Version: [3]uint32{4, 0, 0}, DataStart: 312, DataSize: uint32(312 + len(more)), Targets: targets}
		copy(h.Name[:], name)
		var b bytes.Buffer
		if err := binary.Write(&b, binary.LittleEndian, h); err != nil {
			return fmt.Errorf("device mapper: %w", err)
		}
		buf := append(b.Bytes(), more...)
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, control.Fd(), request, uintptr(unsafe.Pointer(&buf[0]))); e != 0 {
			return fmt.Errorf("device mapper: %s of %s: %w", what, name, e)
		}
		return nil
	}
	if create {
		if err := call("creation", dmCreate, 0, nil); err != nil {
			return err
		}
	}
	// Reads, writes and flushes: device, offset and milliseconds.
	args := fmt.Sprintf("%[1]s 0 0 %[1]s 0 0 %[1]s 0 %[2]d\x00", below, flush.Milliseconds())
	for len(args)%8 != 0 {
		args += "\x00"
	}
	t := dmTarget{Length: uint64(size / 512)}
	copy(t.Type[:], "delay")
	var table bytes.Buffer
	if err := binary.Write(&table, binary.LittleEndian, t); err != nil {
		return fmt.Errorf("device mapper: %w", err)
	}
	table.WriteString(args)
	if err := call("table", dmLoad, 1, table.Bytes()); err != nil {
		return err
	}
	return call("start", dmResume, 0, nil)
}
