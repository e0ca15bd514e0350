package workload

// IsUID says whether s has the form of a pod's uid: a UUID in lower case. What
// is removed because no pod owns it must have this form, or be made of it:
// something else in the folder is not ours.
func IsUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		switch dash := i == 8 || i == 13 || i == 18 || i == 23; {
		case dash != (c == '-'):
			return false
		case !dash && (c < '0' || c > '9') && (c < 'a' || c > 'f'):
			return false
		}
	}
	return true
}
