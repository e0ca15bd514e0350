package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Error is what a plugin answers when it fails.
type Error struct {
	Plugin, Command string
	Code            int    `json:"code"`
	Msg             string `json:"msg"`
	Details         string `json:"details"`
}

// Error implements error.
func (e *Error) Error() string {
	s := fmt.Sprintf("CNI plugin %s (%s): %s", e.Plugin, e.Command, e.Msg)
	if e.Details != "" {
		s += "; " + e.Details
	}
	return s
}

// find looks a plugin up.
func (n *Networks) find(kind string, dirs []string) (string, error) {
	for _, d := range dirs {
		p := filepath.Join(d, kind)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("CNI plugin %s is in none of %s: install it (Debian: containernetworking-plugins), or change the configuration in %s", kind, strings.Join(dirs, ", "), n.c.ConfDir)
}

// run gives one plugin its part of the list and returns its answer.
func (n *Networks) run(ctx context.Context, command string, l *List, raw json.RawMessage, at Attachment, previous json.RawMessage) (json.RawMessage, error) {
	var p plugin
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, fmt.Errorf("CNI plugin: %w", err)
	}
	path, err := n.find(p.Type, at.BinDirs)
	if err != nil {
		return nil, err
	}
	in, err := input(l, raw, p, at, previous)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %s", timeout))
	defer cancel()
	cmd := exec.CommandContext(ctx, path)
	cmd.WaitDelay = time.Second // a child that holds the pipes
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, &errs
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+command, "CNI_CONTAINERID="+at.ID, "CNI_NETNS="+at.NetNS, "CNI_IFNAME="+ifname,
		"CNI_PATH="+strings.Join(at.BinDirs, ":"), "CNI_ARGS="+arguments(at, p.static()))
	if err := cmd.Run(); err != nil {
		e := &Error{Plugin: p.Type, Command: command}
		if json.Unmarshal(out.Bytes(), e) == nil && e.Msg != "" {
			return nil, e
		}
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		e.Msg, e.Details = err.Error(), strings.TrimSpace(tail(errs.String()))
		return nil, e
	}
	if command == "ADD" && len(bytes.TrimSpace(out.Bytes())) == 0 {
		return nil, &Error{Plugin: p.Type, Command: command, Msg: "it answered nothing"}
	}
	return out.Bytes(), nil
}

func tail(s string) string { return s[max(len(s)-512, 0):] }

// input is the plugin's configuration with what the protocol adds to it.
func input(l *List, raw json.RawMessage, p plugin, at Attachment, previous json.RawMessage) ([]byte, error) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, fmt.Errorf("CNI plugin %s: %w", p.Type, err)
	}
	runtime := map[string]any{}
	if p.Capabilities["portMappings"] && len(at.Ports) > 0 {
		runtime["portMappings"] = at.Ports
	}
	if p.Capabilities["ips"] && !p.static() && len(at.Addresses) > 0 {
		ips := []string{}
		for _, a := range at.Addresses {
			ips = append(ips, a.Prefix.String())
		}
		runtime["ips"] = ips
	}
	set := map[string]any{"name": l.Name, "cniVersion": l.Version}
	if len(runtime) > 0 {
		set["runtimeConfig"] = runtime
	}
	if previous != nil {
		set["prevResult"] = previous
	}
	for k, v := range set {
		b, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("CNI plugin %s: %w", p.Type, err)
		}
		m[k] = b
	}
	b, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("CNI plugin %s: %w", p.Type, err)
	}
	return b, nil
}

// arguments say whose pod it is, in the words that plugins for Kubernetes
// know, and to static the address and its gateway.
func arguments(at Attachment, static bool) string {
	args := []string{"IgnoreUnknown=1", "K8S_POD_NAMESPACE=" + at.Namespace, "K8S_POD_NAME=" + at.Pod, "K8S_POD_INFRA_CONTAINER_ID=" + at.ID}
	var ips, gateways []string
	for _, a := range at.Addresses {
		ips, gateways = append(ips, a.Prefix.String()), append(gateways, a.Gateway.String())
	}
	if static && len(ips) > 0 {
		args = append(args, "IP="+strings.Join(ips, ","), "GATEWAY="+strings.Join(gateways, ","))
	}
	return strings.Join(args, ";")
}
