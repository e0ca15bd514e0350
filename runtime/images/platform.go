package images

import (
	"fmt"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Platform is what a program is built for, in Go's words. Variant is arm's
// version ("v7") or amd64's level ("v2").
type Platform struct {
	OS, Architecture, Variant string
}

func (p Platform) String() string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

// Local is the platform of this machine's user space: of this program, not of
// the kernel, since a 64-bit kernel often runs below a 32-bit user space.
func Local() Platform {
	p := Platform{OS: "linux", Architecture: runtime.GOARCH}
	switch p.Architecture {
	case "arm":
		var u unix.Utsname
		machine := ""
		if unix.Uname(&u) == nil {
			machine = unix.ByteSliceToString(u.Machine[:])
		}
		p.Variant = armVariant(machine)
	case "arm64":
		p.Variant = "v8"
	case "amd64":
		p.Variant = amd64Level()
	}
	return p
}

// armVariant is what a 32-bit user space can run on the machine that uname(2)
// names.
func armVariant(machine string) string {
	switch {
	case strings.HasPrefix(machine, "armv5"):
		return "v5"
	case strings.HasPrefix(machine, "armv6"), machine == "":
		return "v6"
	}
	return "v7" // armv7l, armv8l, aarch64
}

// amd64Level is the micro-architecture level of the x86-64 psABI.
func amd64Level() string {
	x := cpu.X86
	switch {
	case x.HasAVX2 && x.HasBMI1 && x.HasBMI2 && x.HasFMA && x.HasAVX && x.HasSSE42 && x.HasPOPCNT:
		return "v3"
	case x.HasSSE42 && x.HasSSSE3 && x.HasPOPCNT && x.HasCX16:
		return "v2"
	}
	return "v1"
}

// runnable lists what runs on p, best first.
func (p Platform) runnable() []Platform {
	with := func(variants ...string) (out []Platform) {
		for _, v := range variants {
			out = append(out, Platform{p.OS, p.Architecture, v})
		}
		return out
	}
	levels := func(all ...string) []string {
		i := slices.Index(all, p.Variant)
		return append(slices.Clone(all[max(i, 0):]), "")
	}
	switch p.Architecture {
	case "arm":
		return with(levels("v7", "v6", "v5")...)
	case "arm64":
		return with("v8", "")
	case "amd64":
		return with(levels("v3", "v2", "v1")...)
	}
	return with("", p.Variant)
}

// rank is how well want runs on p: 0 is best, -1 is not at all.
func (p Platform) rank(want Platform) int {
	return slices.Index(p.runnable(), want)
}

func platformOf(p *v1.Platform) Platform {
	if p == nil {
		return Platform{}
	}
	return Platform{p.OS, p.Architecture, p.Variant}
}

// wasmPlatform says whether an index's entry is a module.
func wasmPlatform(p Platform) bool {
	return p.Architecture == "wasm" || p.Architecture == "wasm32"
}

// choose picks the entry of an index for p; for a Wasm runtime an entry that
// says wasm is best. The error says what is offered.
func choose(image string, ix *v1.IndexManifest, p Platform, wasm bool) (v1.Descriptor, error) {
	best, at := -1, -1
	var offers []string
	for i := range ix.Manifests {
		d := &ix.Manifests[i]
		if d.MediaType != "" && !d.MediaType.IsImage() && !d.MediaType.IsIndex() || d.Annotations["vnd.docker.reference.type"] != "" {
			continue // attestations and the like
		}
		if d.Platform == nil {
			// Nothing is said of it: it is taken if nothing better is there.
			if best < 0 {
				best, at = 1000, i
			}
			continue
		}
		o := platformOf(d.Platform)
		r := p.rank(o)
		if wasm {
			if r = -1; wasmPlatform(o) {
				r = 0
			}
		}
		if r >= 0 && (best < 0 || r < best) {
			best, at = r, i
		}
		if s := o.String(); !slices.Contains(offers, s) {
			offers = append(offers, s)
		}
	}
	if at < 0 {
		if wasm {
			p = Platform{OS: "wasi", Architecture: "wasm"}
		}
		return v1.Descriptor{}, wrongPlatform(image, offers, p)
	}
	return ix.Manifests[at], nil
}

func wrongPlatform(image string, offers []string, p Platform) error {
	const most = 20
	if len(offers) == 0 {
		offers = []string{"nothing"}
	} else if len(offers) > most {
		offers = append(offers[:most:most], fmt.Sprintf("and %d more", len(offers)-most))
	}
	return &workload.StartError{Reason: ReasonPull,
		Message: fmt.Sprintf("image %s is for %s, and this node runs %s", image, strings.Join(offers, ", "), p),
		Hint:    "build the image for this platform, or place the pod with nodeSelector kubernetes.io/arch"}
}
