package state

import "unique"

// internHeader replaces strings that many headers share with one copy. The
// garbage collector takes a copy back when no header holds it.
func internHeader(h *Header) {
	for _, s := range [...]*string{&h.Key.Kind, &h.Key.Namespace, &h.APIVersion, &h.NodeName, &h.Phase} {
		*s = intern(*s)
	}
	for i := range h.Owners {
		h.Owners[i].UID = intern(h.Owners[i].UID)
		h.Owners[i].Kind = intern(h.Owners[i].Kind)
		h.Owners[i].Name = intern(h.Owners[i].Name)
	}
	for i := range h.Finalizers {
		h.Finalizers[i] = intern(h.Finalizers[i])
	}
	for i := range h.Requests {
		h.Requests[i].Name = intern(h.Requests[i].Name)
	}
	for i := range h.Allocatable {
		h.Allocatable[i].Name = intern(h.Allocatable[i].Name)
	}
	for i := range h.HostPorts {
		h.HostPorts[i].Protocol = intern(h.HostPorts[i].Protocol)
	}
}

func intern(s string) string {
	if s == "" {
		return ""
	}
	return unique.Make(s).Value()
}
