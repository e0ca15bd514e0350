package oci

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/moby/sys/user"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// resolveUser is the uid, gid and groups of a container: what the pod says,
// else what the image says, whose names are looked up in its own files.
func resolveUser(rootfs, imageUser string, s workload.Spec) (u specs.User, home string, err error) {
	want := imageUser
	if s.Identity.UID != nil {
		want = fmt.Sprint(*s.Identity.UID) // the image's group was for its own user
	}
	root, err := os.OpenRoot(rootfs) // links in an image lead nowhere else
	if err != nil {
		return u, "", fmt.Errorf("root file system: %w", err)
	}
	defer func() { _ = root.Close() }()
	open := func(name string) io.Reader {
		f, err := root.Open(name)
		if err != nil {
			return nil
		}
		defer func() { _ = f.Close() }()
		b, err := io.ReadAll(io.LimitReader(f, 1<<20))
		if err != nil {
			return nil
		}
		return bytes.NewReader(b)
	}
	got, err := user.GetExecUser(want, &user.ExecUser{Home: "/"}, open("etc/passwd"), open("etc/group"))
	if err != nil {
		return u, "", &workload.StartError{
			Reason: "CreateContainerConfigError", Fatal: true, Err: err,
			Message: fmt.Sprintf("user %q of the image: %v", want, err), Hint: "runAsUser takes a number",
		}
	}
	u.UID, u.GID = uint32(got.Uid), uint32(got.Gid)
	if s.Identity.GID != nil {
		u.GID = uint32(*s.Identity.GID)
	}
	var groups []uint32
	if !s.Security.StrictGroups {
		for _, g := range got.Sgids {
			groups = append(groups, uint32(g))
		}
	}
	for _, g := range s.Identity.Groups {
		groups = append(groups, uint32(g))
	}
	for _, g := range append([]uint32{u.GID}, groups...) {
		if !slices.Contains(u.AdditionalGids, g) {
			u.AdditionalGids = append(u.AdditionalGids, g)
		}
	}
	if s.Security.RunAsNonRoot && u.UID == 0 {
		return u, "", &workload.StartError{
			Reason: "CreateContainerConfigError", Message: "container has runAsNonRoot and image will run as root",
			Hint: "set runAsUser, or use an image with a user of its own",
		}
	}
	return u, got.Home, nil
}
