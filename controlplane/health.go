package controlplane

import (
	"context"
	"errors"
	"fmt"

	"github.com/dunlin-project/dunlin/controlplane/api"
)

// checks are what this server's readiness depends on.
func (s *Server) checks() []api.HealthCheck {
	return []api.HealthCheck{
		{Name: "consensus", Check: func(context.Context) error { return s.raft.Err() }},
		{Name: "disk", Check: func(context.Context) error { return s.raft.Fault() }},
		{Name: "leader", Check: s.hasLeader},
	}
}

// hasLeader fails while this server knows of none.
func (s *Server) hasLeader(context.Context) error {
	if _, leading := s.raft.Leadership(); leading {
		return nil
	}
	if id, _ := s.raft.Leader(); id == "" || id == s.raft.ServerID() {
		if fault := s.raft.Fault(); fault != nil {
			return fmt.Errorf("no server leads, and this one cannot: %w", fault)
		}
		return errors.New("no leader yet")
	}
	return nil
}
