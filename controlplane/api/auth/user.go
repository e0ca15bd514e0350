package auth

import (
	"context"
	"slices"
	"strings"
)

// Names and groups with a fixed meaning, as upstream spells them.
const (
	AnonymousUser        = "system:anonymous"
	AdminsGroup          = "system:masters"
	NodesGroup           = "system:nodes"
	AuthenticatedGroup   = "system:authenticated"
	UnauthenticatedGroup = "system:unauthenticated"
	ServiceAccountsGroup = "system:serviceaccounts"

	nodeUserPrefix           = "system:node:"
	serviceAccountUserPrefix = "system:serviceaccount:"
)

// Keys of User.Extra, as upstream spells them.
const (
	ExtraCredentialID = "authentication.kubernetes.io/credential-id"
	ExtraPodName      = "authentication.kubernetes.io/pod-name"
	ExtraPodUID       = "authentication.kubernetes.io/pod-uid"
	ExtraNodeName     = "authentication.kubernetes.io/node-name"
	ExtraNodeUID      = "authentication.kubernetes.io/node-uid"
)

// User is who makes a request. It is immutable once it is in a context.
type User struct {
	Name   string
	UID    string
	Groups []string
	Extra  map[string][]string
}

// InGroup says whether the user belongs to a group. A nil user is in none.
func (u *User) InGroup(group string) bool {
	return u != nil && slices.Contains(u.Groups, group)
}

// Authenticated says whether the user proved an identity.
func (u *User) Authenticated() bool { return u.InGroup(AuthenticatedGroup) }

// NodeName returns the node the user is, if it is one: it must carry both
// the name and the group.
func (u *User) NodeName() (string, bool) {
	if !u.InGroup(NodesGroup) {
		return "", false
	}
	name, ok := strings.CutPrefix(u.Name, nodeUserPrefix)
	return name, ok && name != ""
}

// NodeUser is the user name of a node.
func NodeUser(node string) string { return nodeUserPrefix + node }

// ServiceAccountUser is the user name of a ServiceAccount.
func ServiceAccountUser(namespace, name string) string {
	return serviceAccountUserPrefix + namespace + ":" + name
}

// ServiceAccountOf splits a ServiceAccount's user name.
func ServiceAccountOf(user string) (namespace, name string, ok bool) {
	rest, ok := strings.CutPrefix(user, serviceAccountUserPrefix)
	if !ok {
		return "", "", false
	}
	namespace, name, ok = strings.Cut(rest, ":")
	if !ok || namespace == "" || name == "" || strings.Contains(name, ":") {
		return "", "", false
	}
	return namespace, name, true
}

// serviceAccount is the user of a ServiceAccount.
func serviceAccount(namespace, name, uid string) *User {
	return &User{
		Name: ServiceAccountUser(namespace, name),
		UID:  uid,
		Groups: []string{
			ServiceAccountsGroup,
			ServiceAccountsGroup + ":" + namespace,
			AuthenticatedGroup,
		},
	}
}

// authenticated returns the groups with system:authenticated added once.
func authenticated(groups []string) []string {
	if slices.Contains(groups, AuthenticatedGroup) {
		return groups
	}
	return append(slices.Clone(groups), AuthenticatedGroup)
}

type userKey struct{}

// WithUser returns a context that carries the user.
func WithUser(ctx context.Context, u *User) context.Context {
	return context.WithValue(ctx, userKey{}, u)
}

// UserFrom returns the context's user; ok is false if it carries none.
func UserFrom(ctx context.Context) (u *User, ok bool) {
	u, ok = ctx.Value(userKey{}).(*User)
	return u, ok && u != nil
}
