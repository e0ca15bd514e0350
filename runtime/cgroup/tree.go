package cgroup

import (
	"log/slog"
)

// Config of a Tree.
type Config struct {
	// Mount is where the hierarchies are; empty is "/sys/fs/cgroup".
	Mount string
	// Name of the root group that is ours; empty is "dunlin".
	Name   string
	Logger *slog.Logger
}

// Tree is our root group on every hierarchy in use.
type Tree struct {
	cfg   Config
	facts Facts
}

// Facts says what can be enforced here.
func (t *Tree) Facts() Facts { return t.facts }

// Create makes a group, and the ones above it, with limits.
func (t *Tree) Create(path string, l Limits) (Group, error) { return nil, ErrNone }

// Open is a group that was made before.
func (t *Tree) Open(path string) Group { return nil }
